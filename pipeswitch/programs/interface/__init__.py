"""Interface of a program to the rest of the system: inputs, outputs, layers and bytes."""
