package nodelink

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"google.golang.org/protobuf/proto"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
)

// store keeps the last good tables and the highest term in a directory.
//
// The file "tables" is one line that names format, version and role, then
// records: length and CRC-32C of the payload (uint32, little-endian), payload (an
// Update). The first is a snapshot, the rest are deltas to it, so that a change
// costs its own size; when the deltas outgrow the snapshot, the file is written
// whole again, beside, and renamed into place. The file is as secret as the flow
// seed in it.
type store struct {
	log  *slog.Logger
	dir  string
	path string // of the tables
	role string
	term uint64 // highest seen

	lock     *os.File // held against a second process
	file     *os.File // open for appending; nil before the first rewrite
	snapshot int      // bytes of the snapshot's record
	deltas   int      // bytes of the records after it
	stale    bool     // the file is not what runs; rewrite it
}

const (
	storeVersion = 1
	// Below this many bytes of deltas a rewrite is not worth its while.
	storeSlack = 1 << 20
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func (s *store) header() string { return fmt.Sprintf("quartet-tables %d %s\n", storeVersion, s.role) }

func openStore(dir, role string, log *slog.Logger) (*store, error) {
	if dir == "" {
		return nil, errors.New("open state: no directory given")
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("open state: %w", err)
	}
	s := &store{log: log, dir: dir, path: filepath.Join(dir, "tables"), role: role, stale: true}
	var err error
	if s.lock, err = os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600); err != nil {
		return nil, fmt.Errorf("open state: %w", err)
	}
	if err := syscall.Flock(int(s.lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		_ = s.lock.Close()
		return nil, fmt.Errorf("open state: another process runs on %s", dir)
	}
	text, err := os.ReadFile(filepath.Join(dir, "term"))
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		_ = s.lock.Close()
		return nil, fmt.Errorf("open state: %w", err)
	default:
		s.term, err = strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
		if err != nil {
			_ = s.lock.Close()
			return nil, fmt.Errorf("open state: %s does not hold a term: remove it if no stale manager can be running",
				filepath.Join(dir, "term"))
		}
	}
	return s, nil
}

// setTerm records the highest term, durably.
func (s *store) setTerm(term uint64) error {
	if err := s.write("term", []byte(strconv.FormatUint(term, 10)+"\n")); err != nil {
		return fmt.Errorf("keep term: %w", err)
	}
	s.term = term
	return nil
}

// write replaces a file of the directory by one that is written beside.
func (s *store) write(name string, content ...[]byte) (err error) {
	f, err := os.OpenFile(filepath.Join(s.dir, name+".tmp"), os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name())
		}
	}()
	for _, c := range content {
		if _, err := f.Write(c); err != nil {
			_ = f.Close()
			return err
		}
	}
	if err := f.Sync(); err != nil {
		_ = f.Close()
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	return os.Rename(f.Name(), filepath.Join(s.dir, name))
}

// load reads the updates that the file has: a snapshot and deltas. If it has
// none that can be used, it says why in one warning. A last record that was cut
// off in mid-write is left out: what precedes it ran.
func (s *store) load() []*quartetv1.Update {
	content, err := os.ReadFile(s.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	var updates []*quartetv1.Update
	if err == nil {
		updates, err = s.parse(content)
	}
	if err != nil {
		s.log.Warn("last good tables ignored", "file", s.path, "error", err)
		return nil
	}
	return updates
}

func (s *store) parse(content []byte) ([]*quartetv1.Update, error) {
	header := s.header()
	if !strings.HasPrefix(string(content[:min(len(header), len(content))]), header) {
		line, _, _ := strings.Cut(string(content[:min(64, len(content))]), "\n")
		return nil, fmt.Errorf("it begins with %q instead of %q: another version or not such a file", line, strings.TrimSpace(header))
	}
	at := len(header)
	var updates []*quartetv1.Update
	for at < len(content) {
		rest := content[at:]
		if len(rest) < 8 || len(rest)-8 < int(binary.LittleEndian.Uint32(rest)) {
			break
		}
		payload := rest[8 : 8+int(binary.LittleEndian.Uint32(rest))]
		if crc32.Checksum(payload, castagnoli) != binary.LittleEndian.Uint32(rest[4:]) {
			return nil, fmt.Errorf("the checksum at byte %d is wrong", at)
		}
		u := &quartetv1.Update{}
		if err := proto.Unmarshal(payload, u); err != nil {
			return nil, fmt.Errorf("the record at byte %d can't be read: %w", at, err)
		}
		updates = append(updates, u)
		at += 8 + len(payload)
	}
	if len(updates) == 0 {
		return nil, errors.New("it has no complete snapshot")
	}
	return updates, nil
}

func record(u *quartetv1.Update) ([]byte, error) {
	b, err := proto.MarshalOptions{}.MarshalAppend(make([]byte, 8, 8+proto.Size(u)), u)
	if err != nil {
		return nil, err
	}
	binary.LittleEndian.PutUint32(b, uint32(len(b)-8))
	binary.LittleEndian.PutUint32(b[4:], crc32.Checksum(b[8:], castagnoli))
	return b, nil
}

// full says that a rewrite is due.
func (s *store) full() bool {
	return s.stale || s.file == nil || s.deltas > max(s.snapshot, storeSlack)
}

// rewrite replaces the file by one snapshot.
func (s *store) rewrite(u *quartetv1.Update) error {
	s.stale = true
	s.close()
	b, err := record(u)
	if err != nil {
		return fmt.Errorf("keep tables: %w", err)
	}
	if err := s.write("tables", []byte(s.header()), b); err != nil {
		return fmt.Errorf("keep tables: %w", err)
	}
	if s.file, err = os.OpenFile(s.path, os.O_WRONLY|os.O_APPEND, 0); err != nil {
		return fmt.Errorf("keep tables: %w", err)
	}
	s.snapshot, s.deltas, s.stale = len(b), 0, false
	return nil
}

// append adds a delta. A failed one makes the next write a rewrite.
func (s *store) append(u *quartetv1.Update) error {
	b, err := record(u)
	if err == nil {
		_, err = s.file.Write(b)
	}
	if err != nil {
		s.stale = true
		return fmt.Errorf("keep tables: %w", err)
	}
	s.deltas += len(b)
	return nil
}

// unlock lets another process have the directory.
func (s *store) unlock() {
	s.close()
	_ = s.lock.Close()
}

func (s *store) close() {
	if s.file != nil {
		_ = s.file.Close()
		s.file = nil
	}
}
