"""The options of ssh_config and their values.

An unknown option is a typing error, or a restriction that we would then violate. So it is refused,
as the ssh client does, unless `IgnoreUnknown` names it.
"""

import re

OF_SEVERAL_WORDS = """
canonicaldomains canonicalizepermittedcnames channeltimeout globalknownhostsfile ignoreunknown ipqos
localforward logverbose permitremoteopen rekeylimit remoteforward revokedhostkeys sendenv setenv
userknownhostsfile
"""

OF_ONE_WORD = """
addkeystoagent addressfamily batchmode bindaddress bindinterface canonicalizefallbacklocal
canonicalizehostname canonicalizemaxdots casignaturealgorithms certificatefile
challengeresponseauthentication checkhostip ciphers clearallforwardings compression
connectionattempts connecttimeout controlmaster controlpath controlpersist dynamicforward
enableescapecommandline enablesshkeysign escapechar exitonforwardfailure fingerprinthash
forkafterauthentication forwardagent forwardx11 forwardx11timeout forwardx11trusted gatewayports
gssapiauthentication gssapiclientidentity gssapidelegatecredentials gssapikexalgorithms
gssapikeyexchange gssapirenewalforcesrekey gssapiserveridentity gssapitrustdns hashknownhosts
hostbasedacceptedalgorithms hostbasedauthentication hostbasedkeytypes hostkeyalgorithms hostkeyalias
hostname identitiesonly identityagent identityfile kbdinteractiveauthentication
kbdinteractivedevices kexalgorithms loglevel macs nohostauthenticationforlocalhost
numberofpasswordprompts obscurekeystroketiming passwordauthentication permitlocalcommand
pkcs11provider port preferredauthentications proxyjump proxyusefdpass pubkeyacceptedalgorithms
pubkeyacceptedkeytypes pubkeyauthentication refuseconnection requesttty requiredrsasize rsaminsize
securitykeyprovider serveralivecountmax serveraliveinterval sessiontype stdinnull
streamlocalbindmask streamlocalbindunlink stricthostkeychecking syslogfacility tag tcpkeepalive
tunnel tunneldevice updatehostkeys user verifyhostkeydns visualhostkey warnweakcrypto xauthlocation
"""

RETIRED_WORDS = """
afstokenpassing cipher compressionlevel dsaauthentication fallbacktorsh globalknownhostsfile2
identityfile2 kerberosauthentication kerberostgtpassing keepalive protocol protocolkeepalives
rhostsauthentication rhostsrsaauthentication rsaauthentication skeyauthentication smartcarddevice
tisauthentication useblacklistedkeys useprivilegedport useroaming userknownhostsfile2 usersh
"""

COMMANDS = frozenset({"proxycommand", "localcommand", "remotecommand", "knownhostscommand"})
"""Options whose value is the rest of the line, quotes included."""

LISTS = frozenset(OF_SEVERAL_WORDS.split())
"""Options that take several words."""

FILES = frozenset({"userknownhostsfile", "globalknownhostsfile", "revokedhostkeys"})
"""Those of them whose words are file names, which may contain blanks."""

OF_KEYS = frozenset({"identityfile", "certificatefile", "identityagent"})
"""Options that name one file each, or none."""

RETIRED = frozenset(RETIRED_WORDS.split())
"""Old options without a meaning today, whatever their values."""

KEYWORDS = COMMANDS | LISTS | RETIRED | frozenset(OF_ONE_WORD.split())
"""Every option up to OpenSSH 10, and those that distributions add."""

SWITCH = "yes|no"
VALUES: dict[str, str] = {
    "addressfamily": "any|inet|inet6",
    "canonicalizehostname": "yes|no|always",
    "canonicalizemaxdots": r"\d{1,9}",
    "checkhostip": SWITCH,
    "connecttimeout": r"none|(\d{1,9}[smhdw]?)+",
    "hashknownhosts": SWITCH,
    "identitiesonly": SWITCH,
    "port": r"0*([1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d\d|655[0-2]\d|6553[0-5])",
    "pubkeyauthentication": "yes|no|unbound|host-bound",
    "requiredrsasize": r"\d{1,9}",
    "rsaminsize": r"\d{1,9}",
    "stricthostkeychecking": "yes|no|ask|off|accept-new",
}
"""The values of the options that we follow, in lower case, as regular expressions."""


def value_of(keyword: str, value: str) -> str | None:
    """Return a value in its normal form; None when the option takes no such value."""
    rule = VALUES.get(keyword)
    if rule is None:
        return value
    plain = {"true": "yes", "false": "no"}.get(value.lower(), value.lower())
    return plain if re.fullmatch(rule, plain, re.ASCII) else None


def expected(keyword: str) -> str:
    """Return the values that an option takes, for a message."""
    rule = VALUES[keyword]
    return "a number" if "\\" in rule else rule.replace("|", ", ")
