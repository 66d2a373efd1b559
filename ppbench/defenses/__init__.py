"""The in-tree defenses. Import as `ppbench.defenses.x`, never as `defenses.x`."""
