"""What everything else stands on: errors, files, devices, settings. Imports nothing of ours."""
