"""What tests start from: this repository, its model, a text in English, and a preset."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
EMBEDDED = ROOT / "models" / "embedded"
TEXT = ROOT / "LICENSE"
PRESET = "antkv-1bit"
