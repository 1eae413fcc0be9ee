"""What is read and drawn of runs and of methods; training imports none of it."""
