"""What a run is: plain data, without input or output."""
