"""The numbers of steps: when they are due, their sums and transfers from the device, and the file of their rows."""
