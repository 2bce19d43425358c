"""From shards to batches on the device."""
