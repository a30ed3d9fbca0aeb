"""What stages of a predicted run wait for: schedules, sends, and the exchange of gradients."""
