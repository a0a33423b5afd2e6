"""Names of what a run's folder holds."""

STATUS_FILE = "status.json"
