"""The model's modules, from single layers to `K3Model`."""
