"""GPU kernels of decoding, blocks and updates."""
