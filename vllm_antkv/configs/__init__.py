"""Example settings and sink tables, installed as vllm_antkv.configs."""
