"""The report of finished or running runs as one HTML file: reads run folders, chooses what fits, writes the page.

Nothing here imports torch. `collect` reads, `reduce` and `shown_responses` choose, `findings` and `changed_settings`
derive, `page` writes.
"""
