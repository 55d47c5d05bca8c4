"""What a loaded model's attention layers are given, and how that is found out."""
