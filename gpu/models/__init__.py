"""Models as executed: one decoder and one encoder, whose families differ in facts of their specs."""
