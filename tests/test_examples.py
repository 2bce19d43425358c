"""The examples are what their platforms take."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.lab import warm
from tests.lab.data import drawn_shards
from tests.lab.needs import need

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(path for path in EXAMPLES.iterdir() if path.suffix in (".sh", ".sbatch"))
MANIFESTS = list(yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text()))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_one(path):
    """`bash -n` reads it, and shellcheck finds nothing."""
    for command in (["bash", "-n"], ["shellcheck", "--shell=bash"]):
        output = subprocess.run([*command, path], capture_output=True, text=True, check=False)
        assert output.returncode == 0, output.stdout + output.stderr


@pytest.mark.parametrize(
    "manifest",
    [manifest for manifest in MANIFESTS if manifest["kind"] != "TrainJob"],
    ids=lambda manifest: manifest["kind"],
)
def test_kubernetes_would_take_the_shard_server(manifest):
    """The official schemas, strictly: a field that they do not know is an error."""
    kubernetes_validate.validate(manifest, "1.37", strict=True)


def test_kubeflow_would_take_the_training():
    """The models of Kubeflow's own package hold every field of the TrainJob, and drop none."""
    from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob  # 1.5 s, not for each worker

    (manifest,) = (manifest for manifest in MANIFESTS if manifest["kind"] == "TrainJob")
    job = TrainerV1alpha1TrainJob.from_dict(manifest)
    assert job is not None
    assert json.loads(json.dumps(job.to_dict())) == manifest


def test_the_manifests_fit_each_other():
    """The training reads from the server's name and port; one image serves and trains."""
    deployment, service, account, job = MANIFESTS[:4]
    pod = deployment["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    (container,) = pod["spec"]["containers"]
    url = f"http://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}/"
    assert job["spec"]["trainer"]["args"][-2:] == ["--data", url]
    assert job["spec"]["trainer"]["image"] == container["image"]
    assert pods()[1][0]["serviceAccountName"] == account["metadata"]["name"]
    assert service["metadata"]["name"] in container["args"]


def pods() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the pods of the server and of the training, each with its one container."""
    runtime = MANIFESTS[3]["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]
    training = runtime["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    both = [MANIFESTS[0]["spec"]["template"]["spec"], training]
    return [(pod, pod["containers"][0]) for pod in both]


def test_pods_have_as_few_rights_as_the_restricted_standard_asks_for():
    """No root, no capability, no way to one, filtered calls, no token, images by their digest."""
    for pod, container in pods():
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert pods()[0][0]["automountServiceAccountToken"] is False
    assert MANIFESTS[2]["automountServiceAccountToken"] is False
    image = MANIFESTS[3]["spec"]["trainer"]["image"]
    assert re.fullmatch(r"[\w./]+:\w+@sha256:[0-9a-f]{64}", image)


def test_only_pods_of_the_job_may_call_the_server_and_each_other():
    """The ports of PyTorch know no password: a policy stands before them, and one before nginx."""
    server, training = (each["spec"] for each in MANIFESTS if each["kind"] == "NetworkPolicy")
    (port,) = MANIFESTS[0]["spec"]["template"]["spec"]["containers"][0]["ports"]
    job = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": MANIFESTS[3]["metadata"]["name"]}}
    assert server["podSelector"] == MANIFESTS[0]["spec"]["selector"]
    assert server["ingress"] == [
        {
            "from": [{"podSelector": job}],
            "ports": [{"port": port["containerPort"], "protocol": "TCP"}],
        }
    ]
    assert training["podSelector"] == job
    assert training["ingress"] == [{"from": [{"podSelector": job}]}]


def test_the_commands_of_the_pods_train(tmp_path):
    """The server and two nodes, as containers start them: both nodes end well, and one model."""
    need("nginx")
    python = warm.interpreter()  # its imports are done
    ours = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "cwd": tmp_path, "text": True}

    def started(command: list[str], folders: dict[str, str], **variables: str) -> Any:
        words = [folders.get(word, word) for word in command[1:]]
        return subprocess.Popen([python, *words], env={**ours, **variables}, **pipes)

    (_, server), _ = pods()
    data, address, port = str(drawn_shards(tmp_path)), "127.0.0.1", str(warm.free_port("127.0.0.1"))
    here = {"/data/shards": data, "$(POD_ADDRESS)": address, "8080": port}
    trainer = MANIFESTS[3]["spec"]["trainer"]
    here |= {trainer["args"][-1]: f"http://{address}:{port}/", "/runs": str(tmp_path / "runs")}
    serving = started([*server["command"], *server["args"]], here)
    try:
        assert serving.stdout is not None and "serving" in serving.stdout.readline()
        small = ("--image-size", "32", "--width", "4", "--batch-size", "8", "--epochs", "1")
        job = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": address}
        job |= {"PET_MASTER_PORT": str(warm.free_port(address)), "CUDA_VISIBLE_DEVICES": ""}
        command = [*trainer["command"], *trainer["args"], *small]
        nodes = [started(command, here, **job, PET_NODE_RANK=node) for node in "01"]
        outputs = [node.communicate()[0] for node in nodes]
    finally:
        serving.terminate()
        serving.communicate()
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert len(list(tmp_path.glob("runs/2*/final.pt"))) == 1


def test_the_ngc_script_tries_again_and_passes_the_code_on(tmp_path):
    """75 three times at most; any other code at once, and what is to run goes through."""
    stand_in = tmp_path / "python"
    stand_in.write_text('#!/bin/sh\necho "$@" >> "$LOG"\nexit "$CODE"\n')
    stand_in.chmod(0o755)
    for code, tries in (("75", 3), ("1", 1), ("0", 1)):
        log = tmp_path / f"log-{code}"
        output = subprocess.run(
            ["bash", EXAMPLES / "ngc.sh", "catdog", "--epochs", "2"],
            env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(log), "CODE": code},
            check=False,
        )
        assert output.returncode == int(code)
        lines = log.read_text().splitlines()
        assert len(lines) == tries
        assert lines[0].endswith("--auto-resume catdog --epochs 2 --data /data/shards")


def test_the_ngc_script_starts_itself_on_each_node(tmp_path):
    """By `bcprun`, of which there is a stand-in: the words of the task arrive as they are typed."""
    stand_ins = {
        "python": 'echo "$#" "$@" >> "$LOG"',
        "bcprun": 'test "$1 $2 $3 $4" = "--nnodes 2 --npernode 1" && shift 4\n'
        'while [ "$1" = --env ]; do export "$2"; shift 2; done\n'
        'test "$1" = --cmd && sh -c "$2" && sh -c "$2"',
    }
    for name, text in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    variables = {"NGC_ARRAY_SIZE": "2", "DATA": "/data/my shards", "LOG": str(tmp_path / "log")}
    subprocess.run(
        ["bash", EXAMPLES / "ngc.sh", "bcprun", "classify", "--model", "a b"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", **variables},
        check=True,
    )
    lines = (tmp_path / "log").read_text().splitlines()
    words = "--runs /results/runs --name ngc --auto-resume classify --model a b"
    assert lines == 2 * [f"13 -m rackrun node {words} --data /data/my shards"]
