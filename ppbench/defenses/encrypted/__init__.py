"""TP-SMC, HybridAlpha and PILE: clients encrypt what they send, and the server decrypts sums."""
