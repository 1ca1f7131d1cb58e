"""What is known of the slots of an optimizer: their roles, gradients that match them, compact and sparse arrays."""
