"""What vLLM's block pool is told of our pages: specs, the managers that keep them, the requests that hold them."""
