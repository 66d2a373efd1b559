"""The in-tree attacks. Import as `ppbench.attacks.x`, never as `attacks.x`."""
