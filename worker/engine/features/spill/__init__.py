"""Blocks that fall out of the prefix cache: kept in host memory and in a file, and read back."""
