"""Facts in a long text: prompts that ask for one, and how many a method finds."""
