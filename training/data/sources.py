"""Where a run's data come from."""

from shards.open import open_source
from shards.source import Source
from training.config import Config


def opened(config: Config, location: str = "") -> Source:
    """The data set at a place, by default that of the settings, through their node cache."""
    return open_source(location or config.data, config.cache, int(config.cache_size * 1e9))
