"""The idea itself: the associative memory, the rules that write it, fast layers and encoders."""
