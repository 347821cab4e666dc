"""Tasks: how they are drawn, the fixed evaluation tasks, and augmentation of training images."""
