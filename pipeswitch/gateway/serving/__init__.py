"""What every protocol asks: the verbs of the Open Inference Protocol, and the server behind
them."""
