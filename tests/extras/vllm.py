"""`vllm`: a vLLM engine in this process, or its server."""
# skip: the index's wheel is built for CUDA; `make test-vllm` runs a build for the CPU
