"""What the rest of the system knows of a program: its inputs, outputs, layers and bytes."""
