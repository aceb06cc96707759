"""Parts that all protocols share: the verbs of the Open Inference Protocol, and the server
behind them."""
