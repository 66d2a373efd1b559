"""What an adversary sees and is asked: View, Evidence, Challenge, Attack, Guess."""
