import torch

torch.load("x.pt")
