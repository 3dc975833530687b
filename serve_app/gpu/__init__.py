"""GPUs: how a slot's tensor and pipeline parallel ranks become placement-group bundles."""
