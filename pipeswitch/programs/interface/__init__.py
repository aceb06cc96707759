"""Description of a program for the rest of the system: inputs, outputs, layers and bytes."""
