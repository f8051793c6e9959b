"""`quire replay`: computes a logged request again, and compares its tokens with the log."""
