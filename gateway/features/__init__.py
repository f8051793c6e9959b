"""Features of a gateway, each in a folder with one door: the modules that others may import."""
