"""Examples to copy: an environment, networks and algorithms outside the framework."""
