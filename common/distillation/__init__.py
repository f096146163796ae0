"""What teachers read or say, and how their words are compared with the policy's: for distill.py."""
