"""The algorithms: rules of learning, the processes of a run, the tools of the command line."""
