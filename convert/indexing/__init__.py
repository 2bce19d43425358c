"""An index and a manifest for tars that other programs have written."""
