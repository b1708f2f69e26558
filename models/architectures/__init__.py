"""Models in layers: families of transformers, torchvision's models, and any nn.Sequential."""
