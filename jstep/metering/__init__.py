"""Metering: cadences of hooks, sums of metrics and their transfer from the device, and files of rows."""
