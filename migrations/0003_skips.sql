-- An operator ended the delivery while an attempt of it was running: it is not tried again, whatever comes of that one.
-- A waiting delivery needs no such word, it is dead at once; a replay takes it back.
ALTER TABLE deliveries ADD COLUMN skipped boolean NOT NULL DEFAULT false;
