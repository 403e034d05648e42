package store

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/zap"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
)

func open(t *testing.T, dir string) *Store {
	t.Helper()
	s, err := Open(t.Context(), Config{Dir: dir, Name: "m1", Log: slog.New(slog.NewTextHandler(t.Output(), nil))})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func load(t *testing.T, s *Store) *State {
	t.Helper()
	st, err := s.Load(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return st
}

func dump(t *testing.T, s *Store) map[string]string {
	t.Helper()
	d, err := s.Dump(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// A restart finds the seed, the generation and every record as they were, and
// its term is a later one.
func TestRestart(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	first := load(t, s)
	if len(first.FlowSeed) != 16 || first.Generation != 0 {
		t.Fatalf("an empty directory has seed %x, generation %d", first.FlowSeed, first.Generation)
	}
	at := time.Unix(1, 2)
	var tx Txn
	tx.Generation(1)
	tx.PutVip(&quartetv1.VipState{Generation: 1, Vip: &quartetv1.Vip{Name: "web"}})
	tx.PutPool(&quartetv1.VipPool{Name: "pool"})
	tx.PutEndpoint("web", "TCP-80", &quartetv1.EndpointState{Generation: 1, Table4: []byte{1, 2}})
	tx.DrainMux("mux1", at)
	tx.DrainDIP("10.0.0.1", "*", at)
	tx.PutNode(&quartetv1.NodeState{Name: "mux1"})
	if err := s.Commit(&tx); err != nil {
		t.Fatal(err)
	}
	before, term := dump(t, s), s.Term()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}

	s = open(t, dir)
	if s.Term() <= term {
		t.Errorf("term %d after %d", s.Term(), term)
	}
	if after := dump(t, s); !maps.Equal(before, after) {
		t.Errorf("after a restart:\n%q\nbefore:\n%q", after, before)
	}
	st := load(t, s)
	if st.Vips["web"].GetGeneration() != 1 || st.Pools["pool"] == nil || st.Nodes["mux1"] == nil ||
		string(st.Endpoints["web"]["TCP-80"].GetTable4()) != "\x01\x02" || st.Generation != 1 ||
		!st.DrainedMuxes["mux1"].Equal(at) || !st.DrainedDIPs[[2]string{"10.0.0.1", "*"}].Equal(at) {
		t.Errorf("read back %+v", st)
	}
	tx = Txn{}
	tx.Generation(2)
	tx.DeleteVip("web")
	if err := s.Commit(&tx); err != nil {
		t.Errorf("commit after a restart: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

// A leader whose election key is gone can write nothing, and fails.
func TestLostLeadership(t *testing.T) {
	s := open(t, t.TempDir())
	defer s.Close()
	load(t, s)
	before := dump(t, s)
	if _, err := s.client.Delete(t.Context(), s.election.Key()); err != nil {
		t.Fatal(err)
	}
	var tx Txn
	tx.Generation(1)
	if err := s.Commit(&tx); err == nil || !strings.Contains(err.Error(), "another leader") {
		t.Errorf("commit: %v", err)
	}
	if err := s.Confirm(t.Context()); err == nil {
		t.Error("confirmed")
	}
	<-s.Failed()
	if err := s.Err(); !strings.Contains(err.Error(), "another leader") {
		t.Errorf("failed: %v", err)
	}
	if after := dump(t, s); !maps.Equal(before, after) {
		t.Errorf("wrote %q", after)
	}
}

// A generation that another transaction has passed is refused.
func TestStaleGeneration(t *testing.T) {
	s := open(t, t.TempDir())
	defer s.Close()
	load(t, s)
	if _, err := s.client.Put(t.Context(), keyGeneration, "7"); err != nil {
		t.Fatal(err)
	}
	var tx Txn
	tx.Generation(1)
	if err := s.Commit(&tx); err == nil {
		t.Error("committed over another's generation")
	}
}

func TestTooLarge(t *testing.T) {
	s := open(t, t.TempDir())
	defer s.Close()
	load(t, s)
	var tx Txn
	tx.PutEndpoint("web", "TCP-80", &quartetv1.EndpointState{Table4: make([]byte, maxRequest)})
	if err := s.Commit(&tx); !errors.Is(err, ErrTooLarge) {
		t.Errorf("commit: %v", err)
	}
}

// What a directory can have wrong is told in one line, and nothing is run.
func TestBadDirectory(t *testing.T) {
	used := func(t *testing.T, change func(*Store)) string {
		dir := t.TempDir()
		s := open(t, dir)
		if change != nil {
			change(s)
		}
		s.Close()
		return dir
	}
	put := func(key, value string) func(*Store) {
		return func(s *Store) {
			if _, err := s.client.Put(context.Background(), key, value); err != nil {
				t.Fatal(err)
			}
		}
	}
	overwrite := func(t *testing.T, pattern string, at int64) string {
		dir := used(t, nil)
		files, _ := filepath.Glob(filepath.Join(dir, pattern))
		if len(files) == 0 {
			t.Fatalf("no %s", pattern)
		}
		for _, name := range files {
			f, err := os.OpenFile(name, os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			junk := make([]byte, 16<<10)
			for i := range junk {
				junk[i] = 0xa5
			}
			if _, err := f.WriteAt(junk, at); err != nil {
				t.Fatal(err)
			}
			f.Close()
		}
		return dir
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	locked := t.TempDir()
	holder := open(t, locked)
	defer holder.Close()
	for _, c := range []struct{ name, dir, want string }{
		{"newer", used(t, put(keySchema, "2")), "schema version 2 and this manager knows up to 1"},
		{"schema", used(t, put(keySchema, "x")), "schema version \"x\""},
		{"vip", used(t, put(keyVips+"web", "\xff")), keyVips + "web"},
		{"key", used(t, put(root+"nonsense", "")), "unknown key"},
		{"database", overwrite(t, "etcd/member/snap/db", 0), "restore the directory"},
		{"log", overwrite(t, "etcd/member/wal/*.wal", 0), "restore the directory"},
		{"file", file, "not a directory"},
		{"locked", locked, "another manager runs on it"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, err := Open(t.Context(), Config{Dir: c.dir, Name: "m1", Log: slog.New(slog.DiscardHandler)})
			if err == nil {
				defer s.Close()
				_, err = s.Load(t.Context())
			}
			if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
				t.Errorf("got %v, want one line with %q", err, c.want)
			}
		})
	}
}

// Changes that are committed together may touch a key more than once; etcd
// refuses such a transaction, and the last one is meant.
func TestKeyTwice(t *testing.T) {
	s := open(t, t.TempDir())
	defer s.Close()
	var txn Txn
	txn.Generation(1)
	txn.PutNode(&quartetv1.NodeState{Name: "mux1", Version: "1"})
	txn.PutNode(&quartetv1.NodeState{Name: "mux1", Version: "2"})
	txn.DrainMux("mux1", time.Unix(1, 0))
	txn.UndrainMux("mux1")
	txn.DeletePool("a")
	txn.PutPool(&quartetv1.VipPool{Name: "a"})
	if err := s.Commit(&txn); err != nil {
		t.Fatal(err)
	}
	st := load(t, s)
	if st.Nodes["mux1"].GetVersion() != "2" || len(st.DrainedMuxes) != 0 || st.Pools["a"] == nil {
		t.Errorf("%+v", st)
	}
}

// A slow request is told without its contents, which may be megabytes.
func TestLogLeavesOutRequests(t *testing.T) {
	var text strings.Builder
	var loud atomic.Bool
	loud.Store(true)
	log := newLogger(slog.New(slog.NewTextHandler(&text, nil)), &loud, func(error) {})
	log.With(zap.String("response", "size:9")).Warn("apply request took too long",
		zap.Duration("took", time.Second), zap.String("request", "txn:<...>"), zap.String("request content", "..."))
	if got := text.String(); !strings.Contains(got, "took=1s") || strings.Contains(got, "request=") || strings.Contains(got, "content") || strings.Contains(got, "response") {
		t.Errorf("%s", got)
	}
}
