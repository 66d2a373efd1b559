"""The adversary's side: attacks, challenges and guesses, victims, and isolated processes for third-party attacks."""
