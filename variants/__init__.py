"""What grpo_variants.py chooses from: the losses that were published beside the papers, and their selections."""
