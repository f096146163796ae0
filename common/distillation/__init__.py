"""What teachers read, and how their words are compared with the policy's: for distill.py."""
