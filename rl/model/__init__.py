"""The decoder that is trained, its fused block, attention and packing."""
