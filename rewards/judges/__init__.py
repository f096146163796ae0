"""What rewards/judge.py is made of."""
