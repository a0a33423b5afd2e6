"""Things to copy from: an environment, networks and an algorithm of one's own."""
