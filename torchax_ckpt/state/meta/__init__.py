"""Values for tensors on the meta device that no checkpoint supplies."""
