"""What this project relies on in vLLM, checked against the sources of any release without installing it.

`entries` says it, `check` compares a release with it, `reviewed/` holds what was looked at. Run by
`make vllm-contract VERSION=...`; the reader of sources (`sources`) imports nothing of vLLM.
"""
