"""What makes an update of a policy: state, objectives, optimizer, checkpoint."""
