"""The codebooks that come with vllm-antkv, one folder per model identity; installed as vllm_antkv.centroids."""
