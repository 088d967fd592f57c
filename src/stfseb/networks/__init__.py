"""The two networks of the paper, and what is needed to go around any other `nn.Module`."""
